"""Data sources, one in each module: files and folders by name."""
