"""The node's devices as its kubelet sees them: offered, given to pods as the plan has it, and looked at again."""
