"""The loader: torch's DataLoader, bounded in bytes, fed by workers that may die."""
