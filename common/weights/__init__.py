"""Transfer of weights from the learner to the generators: format, serving, pulling. Imports no torch."""
