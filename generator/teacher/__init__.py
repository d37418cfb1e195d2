"""The process `spo-teacher`: leases finished episodes, has a stronger model score their tokens, and sends them on."""
