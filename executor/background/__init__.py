"""Another training job in what the foreground leaves idle: paced by law, started as a child."""
