"""`spo run`: a whole run on this machine, its processes, and how it is displayed."""
