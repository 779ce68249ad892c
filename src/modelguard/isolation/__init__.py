"""Models in processes of their own: a mold that loads once and forks workers, their supervision, and transport."""
