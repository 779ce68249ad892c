"""What is known of a process, and what follows from it: facts without a thread, a loop or a lock."""
