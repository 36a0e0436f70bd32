import torch

# The tests' matrices are small: more threads gain nothing, and on a busy machine they cost a factor of thirty.
torch.set_num_threads(1)
