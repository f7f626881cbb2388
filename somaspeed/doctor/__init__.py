"""Open-loop examination: does a checkpoint reproduce its training data, and if not, why?"""
