"""A run on several hosts: over ssh, as a job of Slurm, as a manifest of Kubernetes."""
