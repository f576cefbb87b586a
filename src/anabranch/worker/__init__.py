"""What runs inside Python workers, on executors: the task of an instance and what it is made of."""
