"""Who ranks are and how they talk: groups, named collectives, limits of waiting, signs of life."""
