"""Pure drawing: from a state and a width to lines of (text, token). Imports no Textual."""
