"""The guarded connector, as the launcher ships it into vLLM's own processes.

`eccon_guard` below is a package of its own: its directory goes on the children's PYTHONPATH, and vLLM loads
it by `ec_connector_module_path`. It runs in vLLM's environment, so nothing of eccon is imported there, and
within it only relative imports are used.
"""

from pathlib import Path

__all__ = ["CLASS", "DIRECTORY", "MODULE"]

DIRECTORY = Path(__file__).resolve().parent
"""What goes on the children's PYTHONPATH."""
MODULE = "eccon_guard.connector"
"""`ec_connector_module_path`."""
CLASS = "EcconGuardConnector"
"""`ec_connector`. Not the vendor's name: vLLM looks into its registry before the module path."""
