"""What the directory costs, beside the layouts used elsewhere: `python -m bench.directory`."""
