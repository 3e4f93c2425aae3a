"""A training job: the task, its configuration, the loop of one worker, and the folder that a run is."""
