"""Engine: requests, their schedule, the forward passes and the tokens."""
