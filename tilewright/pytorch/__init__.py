"""PyTorch modules, compiled: called like the module, or as a backend of torch.compile. Only here and in the front end
is torch imported."""
