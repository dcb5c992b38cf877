"""The processes of a training run on one machine: started, logged, watched, stopped."""
