"""What servers need of modelguard, by the server's name. Nothing here is imported unless it is asked for."""
