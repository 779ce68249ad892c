"""gunicorn's configuration as the story has it."""

worker_class = "asgi"
workers = 2  # a copy of the model each, and on two CPUs twice as many threads as these
# A placebo: which allocator serves a process is decided when it starts, before gunicorn reads this.
raw_env = ["LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"]
control_socket_disable = True  # drive.py runs two services beside each other
