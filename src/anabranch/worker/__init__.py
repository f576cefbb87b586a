"""Code that runs in Python workers, on executors: the task of an instance and its parts."""
