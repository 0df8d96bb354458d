"""What this process may really use, which in a container is less than what the host has.

Reads the kernel's own files each time it is asked. Keeps nothing, decides nothing, changes nothing,
and never imports torch.
"""
