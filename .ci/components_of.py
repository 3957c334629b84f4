"""Print what a plugin registers, as KIND:NAME: ``nanotrain plugins --json | components_of.py PLUGIN``."""

import json
import sys

for plugin in json.load(sys.stdin)["plugins"]:
    if plugin["name"] == sys.argv[1]:
        print(*(f"{each['kind']}:{each['name']}" for each in plugin["components"]))
