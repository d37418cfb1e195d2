"""Trackers that a run's metrics are sent to: TensorBoard, Weights & Biases, MLflow, Trackio."""
