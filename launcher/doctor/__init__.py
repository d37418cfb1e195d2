"""`spo doctor`: checks everything a run needs of this machine and of the services around it, before it is started."""
