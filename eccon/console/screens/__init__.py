"""Screens of the console. A screen is a function of the app's state."""
