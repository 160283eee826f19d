"""Pure drawing: from a state and a width to lines of (text, tone). Imports no Textual."""
