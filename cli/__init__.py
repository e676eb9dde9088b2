"""The verbs of the command line, each a thin call of the public function of the same name."""
