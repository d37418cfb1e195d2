"""What keeps the event loop free: time-outs, work in threads, and a watchdog."""
