"""Checks the dashboards with Grafana's own TypeScript types.

    python3 tests/observability/grafana.py FOLDER, where npm may install @grafana/schema and typescript
"""

import json
import subprocess
import sys
from pathlib import Path

from common import DASHBOARDS

TYPES = "@grafana/schema/dist/types/raw/dashboard/x/dashboard_types.gen.d.ts"


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    packages = ["@grafana/schema@12.1.0", "typescript@5.9.2"]
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", *packages]
    subprocess.run(command, check=True, cwd=folder)
    lines = [f'import type {{ Dashboard, Panel }} from "{TYPES}";']
    count = 0
    for path in sorted((DASHBOARDS / "grafana/dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        # The type of a dashboard accepts any panel with a few fields, so each panel is checked alone.
        for panel in dashboard.pop("panels"):
            lines.append(f"export const panel{count}: Panel = {json.dumps(panel)};")
            count += 1
        name = path.stem.replace("-", "_")
        lines.append(f"export const {name}: Dashboard = {json.dumps(dashboard)};")
    (folder / "check.ts").write_text("\n".join(lines))
    options = "--noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext --target es2022"
    command = ["npx", "tsc", *options.split(), "check.ts"]
    subprocess.run(command, check=True, cwd=folder)
    print(f"dashboards: {count} panels are of Grafana's types")


if __name__ == "__main__":
    main()
