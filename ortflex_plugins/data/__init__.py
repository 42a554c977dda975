"""Data sources: files and folders by name."""
