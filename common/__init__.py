"""Code that all processes share: configuration, checks, messages, streams, weights, logs. Imports no process."""
