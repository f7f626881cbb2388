"""Closed-loop evaluation in the simulator: does the checkpoint drive the robot?"""
