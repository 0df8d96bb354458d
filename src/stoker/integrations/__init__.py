"""Frameworks that build or rebuild loaders themselves, and how our engine gets into them.

Lightning, Fabric and MMEngine take a loader as it is and need nothing from here. Imports no
framework: each module does that when it is called, and works with what is already imported.
"""

from stoker.integrations.accelerate import listen
from stoker.integrations.like import like

__all__ = ["like"]

listen()
