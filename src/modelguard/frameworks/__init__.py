"""Integrations with web servers and task queues, one module for each. Importing modelguard imports none of them."""
