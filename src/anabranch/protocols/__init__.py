"""What the coordinator decides, written without I/O: state and event in, next state and orders out.

No clock, thread, file or Spark is known here, so that the code that runs a cluster also runs in a
simulator, under any number of faults.
"""
