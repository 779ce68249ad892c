"""gunicorn's configuration; what has to be there when it starts, `modelguard run` sets."""

worker_class = "asgi"
workers = 1  # one copy of the model, and torch's own threads to use every CPU
control_socket_disable = True  # drive.py runs two services beside each other
