"""How several processes live on one copy of a model."""
