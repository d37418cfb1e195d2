"""`spo quickstart` and `spo prepare`: make a tiny model, its problems, and a configuration."""
