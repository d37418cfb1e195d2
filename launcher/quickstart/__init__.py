"""`spo quickstart` and `spo prepare`: a tiny model, its problems, and a configuration."""
