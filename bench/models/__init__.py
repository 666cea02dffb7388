"""How well profiles are predicted: every measured data set, configurations and workloads held out, peers beside ours."""
