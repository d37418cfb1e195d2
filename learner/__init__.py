"""The learner: trains the policy on stale samples with DeepSpeed and publishes its weights."""
