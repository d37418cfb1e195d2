"""What every process shares: configuration, messages, streams, logs, metrics. Imports no process."""
