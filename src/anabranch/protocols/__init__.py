"""The coordinator's decisions, without I/O: state and event in, next state and orders out.

This code uses no clock, thread, file or Spark, so a simulator runs it under any number of faults.
"""
