"""`spo chaos`: a real run under a seeded schedule of faults, and an audit of its counts."""
