"""Runs model-written code somewhere safe."""
