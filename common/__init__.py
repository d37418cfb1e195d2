"""What every process shares: configuration, messages, streams, logs, metrics. Knows none of them."""
