"""What has threads, locks, forks and clocks: the other packages have none of their own."""
