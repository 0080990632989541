"""openai-node, in node.cjs."""
import os
import subprocess
import unittest

import server


class Node(unittest.TestCase):
    def test_all(self):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "node.cjs")
        done = subprocess.run(["node", "--test", script], env={**os.environ, "QUADRIGA_URL": server.default()}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
