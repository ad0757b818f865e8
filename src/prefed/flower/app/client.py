"""What runs on the nodes."""

from pathlib import Path

from prefed.flower import client_app

app = client_app(Path(__file__).with_name("config.toml"))

# For samples that only this node has:
#
#     def my_data(context):       # context.node_config is what the SuperNode was started with
#         return x, y             # two arrays of the same length
#
#     app = client_app(Path(__file__).with_name("config.toml"), data=my_data)
#
# and own_data=True in server.py. The config's data set then only gives the test set and the number
# of clients. If it sets client_test, that share of x, y is for evaluating the client.
