"""`spo trace`: who did what when, for Perfetto or chrome://tracing."""
