"""Training: what runs in a job on a plan: process groups, overlapped optimizer, pipeline, recovery, trainers' forms."""
