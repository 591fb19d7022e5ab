"""What a lesson or a lab shows and asks: exercises, plots. A room that knows the library and never a notebook."""
